"""Which samples an evaluation looks at. No torch."""


def evaluation_samples(microbatch: int, size: int, num_samples: int) -> list[int]:
    """The samples of a micro-batch of an evaluation: always the same, in their order, from the first one.

    Args:
        microbatch: number in the evaluation.
        size: samples of a micro-batch.
        num_samples: of the split; after the last one the first one comes again.
    """
    return [index % num_samples for index in range(microbatch * size, (microbatch + 1) * size)]
