"""Which samples an evaluation looks at. No torch."""

from elaswave.data.sampler import Draw


def evaluation_draws(microbatch: int, size: int, num_samples: int) -> list[Draw]:
    """The samples of a micro-batch of an evaluation: always the same, in their order, from the first one.

    Args:
        microbatch: number in the evaluation.
        size: samples of a micro-batch.
        num_samples: of the split; after the last one the first one comes again.
    """
    numbers = range(microbatch * size, (microbatch + 1) * size)
    return [Draw(number % num_samples, 0, number % num_samples) for number in numbers]
