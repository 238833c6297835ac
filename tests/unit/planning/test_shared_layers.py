"""What each stage is given where it waits for those before it."""

from itertools import accumulate

import numpy as np
import pytest

from elaswave.planning.programs.shared_layers import loads_with_waits


@pytest.mark.parametrize("way", [1 / 3, 1.0])
def test_stages_that_wait_for_those_before_them_end_together(way):
    speeds, number = [np.array([1.0]), np.array([0.7, 1.0]), np.array([1.0, 0.5, 0.9])], 8
    loads = loads_with_waits(speeds, number, way)
    seconds = [load / own.max() for load, own in zip(loads, speeds, strict=True)]  # of a micro-batch, at one rate
    waits = [0.0, *accumulate(way * each / number for each in seconds)][:-1]
    ends = [wait + load / own.sum() for wait, load, own in zip(waits, loads, speeds, strict=True)]
    assert ends == pytest.approx([1.0] * 3)
    assert loads[0] == 1.0


def test_a_stage_of_a_job_with_very_few_micro_batches_still_gets_layers():
    loads = loads_with_waits([np.ones(4)] * 5, 2, 1.0)
    assert loads.tolist() == [4.0, 2.0, 1.0, 0.5, 0.25]
