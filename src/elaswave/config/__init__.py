"""The typed, validated configuration of a run: what its keys mean, which values go together, how it is read.

``schema`` has the sections and their keys, ``checks`` the checks of single values, ``rules`` the rules between keys,
``costs`` the estimate by which layers are dealt to stages, ``load`` reads TOML and ``--set``, ``toml`` writes TOML,
``reference`` makes the documentation.
"""
