"""The protocol: coordinator, worker and agent as machines without input or output.

Everything that decides who is a member, what is committed and who holds what is in this folder. No sockets, clocks,
threads, torch or random sources: time and events are arguments, and what is to be done comes back as data.
"""
