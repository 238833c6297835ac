"""Links between workers: frames with tags, generations, and the transport that carries them.

Read in this order: ``frames`` (bytes on the wire), ``interface`` (what every transport promises), ``inbox`` (how frames
meet receives, and the generation rules), ``waiter`` (what a wait blocks on); for sockets ``addresses``, ``tls``,
``handshake``, ``unauthenticated`` and ``acceptor`` (connections become links), ``link`` and ``stream``. Tests have a
second transport, within one process. Deliberately absent: knowledge of layouts, steps and state; that is the worker's
and the protocol's.
"""
