"""Points inside a step, told to several probes."""

from elaswave.faults.injection import NoProbe, Probes


class Notes:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def reached(self, phase, index, engine):
        self.notes.append((self.name, phase, index, engine))


def test_all_probes_are_told_in_their_order():
    notes = []
    probes = Probes(Notes("a", notes), NoProbe(), Notes("b", notes))
    probes.reached("vote", 0, "engine")
    probes.reached("gather", 2, "engine")
    assert notes == [(name, phase, index, "engine") for phase, index in (("vote", 0), ("gather", 2)) for name in "ab"]


def test_no_probe_at_all():
    Probes().reached("forward", 0, None)
