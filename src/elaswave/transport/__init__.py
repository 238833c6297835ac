"""Links between workers: frames with tags, generations, and the transport that carries them.

Read in this order: ``interface`` (what every transport promises, and bytes on the wire), ``link`` (how frames meet
receives, the generation rules, what a wait blocks on); for sockets ``addresses``, ``tls``, ``handshake`` and ``stream``
(connections become links). Tests have a
second transport, within one process. Deliberately absent: knowledge of layouts, steps and state; that is the worker's
and the protocol's.
"""
