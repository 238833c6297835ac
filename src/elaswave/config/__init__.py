"""The typed, validated configuration of a run: what its keys mean, which values go together, how it is read.

``schema`` has the sections and their keys, ``values`` the checks of single values and their TOML, ``rules`` the rules
between keys, ``load`` reads TOML and ``--set`` and writes the layout out, ``presets`` reads known devices and models,
``cluster`` says what a run computes on, ``reference`` makes the documentation.
"""
