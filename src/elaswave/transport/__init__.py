"""Links between workers, groups over them, and the transports that carry both.

Read in this order: ``frames`` (bytes on the wire), ``transport`` (what all transports promise), ``inbox`` (how frames
meet receives, and the epoch rules), ``waiter`` (what a wait blocks on); for sockets ``addresses``, ``handshake``,
``acceptor`` (connections become links), ``link`` and ``stream``; ``memory`` (in-process); ``group`` (collectives).
Deliberately absent: knowledge of layouts, steps and state; those live in ``runtime``.
"""
