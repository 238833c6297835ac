"""Links between workers, groups over them, and the transports that carry both.

Read in this order: ``frames`` (bytes on the wire), ``transport`` (the protocol and the matching rules that all
transports share), ``handshake`` (who may connect), ``addresses``, ``link`` and ``stream`` (sockets), ``memory``
(in-process), ``group`` (collectives). Deliberately absent: knowledge of layouts, steps and state; those live in ``runtime``.
"""
