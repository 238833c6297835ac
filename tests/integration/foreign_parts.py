"""Foreign parts of tests. Processes without elaswave serve them: this file imports only what each software has."""

import os
import time
from pathlib import Path


class NumpyMiddle:
    """``tanh(x @ weight + bias)`` in numpy.

    Args:
        width: of input and output.
        faults: folder of files that make a server of this part fail, see `Fault`; "" for none.
    """

    def __init__(self, width=24, faults=""):
        import numpy

        self.np, self.width, self.fault = numpy, width, Fault(faults)

    def init(self, seed):
        draw = self.np.random.default_rng(seed)
        return {
            "weight": draw.normal(0, self.width**-0.5, (self.width, self.width)).astype("float32"),
            "bias": self.np.zeros(self.width, "float32"),
        }

    def forward(self, parameters, x):
        self.fault("forward")
        return self.fault.changed("forward", self.np.tanh(x @ parameters["weight"] + parameters["bias"]))

    def backward(self, parameters, inputs, gradients):
        self.fault("backward")
        (x,), (gradient,) = inputs, gradients
        y = self.np.tanh(x @ parameters["weight"] + parameters["bias"])
        inner = gradient * (1 - y * y)
        weight = x.reshape(-1, self.width).T @ inner.reshape(-1, self.width)
        bias = inner.reshape(-1, self.width).sum(0)
        return (inner @ parameters["weight"].T,), {"weight": weight, "bias": self.fault.changed("backward", bias)}


class Fault:
    """What goes wrong in one server, once: the first that takes the file ``WHAT-METHOD`` out of a folder.

    ``die`` ends the process, ``hang`` stops answering, ``flip`` changes one bit of what is returned, ``nan``
    makes one value of it no number, ``raise`` (which stays, as an error in code does) raises.

    Args:
        folder: of the files.
    """

    def __init__(self, folder):
        self.folder = Path(folder) if folder else None

    def _takes(self, name):
        if self.folder is None:
            return False
        try:
            (self.folder / name).rename(self.folder / f"{name}-taken-{os.getpid()}")
        except OSError:
            return False
        return True

    def __call__(self, method):
        if self._takes(f"die-{method}"):
            os._exit(9)
        if self._takes(f"hang-{method}"):
            time.sleep(600)
        if self.folder is not None and (self.folder / f"raise-{method}").exists():
            raise ValueError(f"this part cannot go {method}")

    def changed(self, method, values):
        if self._takes(f"flip-{method}"):
            values = values.copy()
            values.reshape(-1).view("uint32")[0] ^= 1 << 22  # that no rounding hides
        if self._takes(f"nan-{method}"):
            values = values.copy()
            values.reshape(-1)[0] = float("nan")
        return values


def torch_middle(width=24):
    """The same in torch."""
    import torch

    class Middle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(width, width)

        def forward(self, x):
            return self.map(x).tanh()

    return Middle()


class JaxMiddle:
    """The same in JAX."""

    def __init__(self, width=24):
        self.width = width

    def init(self, seed):
        import jax

        weight = jax.random.normal(jax.random.key(seed), (self.width, self.width)) * self.width**-0.5
        return {"weight": weight, "bias": jax.numpy.zeros(self.width)}

    def apply(self, parameters, x):
        import jax

        return jax.numpy.tanh(x @ parameters["weight"] + parameters["bias"])
