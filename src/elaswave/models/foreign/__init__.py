"""Parts of a model that another process computes with other software, behind one documented protocol (docs/foreign.md).

`server` is the other side: a file that stands alone, with the protocol's codec. `connection` starts a server and moves
messages within bounds, `part` asks for forward and backward and keeps the parameters there up to date, `layer` makes a
layer of it.
"""
