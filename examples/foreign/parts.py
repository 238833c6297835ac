"""What `../foreign.py` has computed elsewhere. Servers load this file; they need neither elaswave nor torch.

Each part maps C numbers to C: ``x + tanh(x @ inner) @ outer``.
"""


def first_values(seed, width):
    """Of both matrices, as lists: numpy is not needed where JAX is, nor the reverse."""
    import random

    draw = random.Random(seed)
    return {
        name: [[draw.gauss(0.0, 0.5 * width**-0.5) for _ in range(width)] for _ in range(width)]
        for name in ("inner", "outer")
    }


class InNumpy:
    """With a backward of its own."""

    def __init__(self, width):
        import numpy

        self.numpy, self.width = numpy, width

    def init(self, seed):
        """First values by name."""
        return {name: self.numpy.array(rows, "float32") for name, rows in first_values(seed, self.width).items()}

    def forward(self, parameters, x):
        """[..., C] to [..., C]."""
        return x + self.numpy.tanh(x @ parameters["inner"]) @ parameters["outer"]

    def backward(self, parameters, inputs, gradients):
        """Gradients of the input, and of the parameters by name."""
        (x,), (gradient,) = inputs, gradients
        hidden = self.numpy.tanh(x @ parameters["inner"])
        before = (gradient @ parameters["outer"].T) * (1 - hidden * hidden)

        def product(a, b):
            return a.reshape(-1, self.width).T @ b.reshape(-1, self.width)

        found = {"inner": product(x, before), "outer": product(hidden, gradient)}
        return (gradient + before @ parameters["inner"].T,), found


class InJax:
    """With JAX's automatic differentiation, compiled."""

    def __init__(self, width):
        self.width = width

    def init(self, seed):
        """First values by name."""
        import jax.numpy as jnp

        return {name: jnp.array(rows, "float32") for name, rows in first_values(seed, self.width).items()}

    def apply(self, parameters, x):
        """[..., C] to [..., C]."""
        import jax.numpy as jnp

        return x + jnp.tanh(x @ parameters["inner"]) @ parameters["outer"]
