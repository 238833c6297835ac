"""The typed, validated configuration of a run: what its keys mean, which values go together, how it is read.

``schema`` has the sections and their keys, ``checks`` the checks of single values, ``rules`` the rules between keys,
``load`` reads TOML and ``--set``, ``layout`` writes the layout out, ``toml`` reads and writes TOML, ``presets`` reads
known devices and models, ``devices`` says what a run computes on, ``memory`` what it needs at least, ``reference``
makes the documentation.
"""
