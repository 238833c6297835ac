"""Interprets one worker's program: runs its actions in order and moves tensors along the routes.

Sends are asynchronous and make progress between layers; a received activation is waited for only by the action that
uses it. The program decides the order, the routes decide the partners; nothing here decides anything.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from elaswave.observability.trace import ACTION, TraceRecorder
from elaswave.transport.frames import Tag
from elaswave.transport.interface import Handle, Transport
from elaswave.types import Action, Hop, Layout, Program
from elaswave.worker.activity import Activity
from elaswave.worker.channels import WAIT_TIMEOUT_S, Channel
from elaswave.worker.compute import Compute


class Batches(Protocol):
    """Where micro-batches come from."""

    def __call__(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of one micro-batch, int64 [samples, context_length] each."""
        ...


class Executor:
    """Runs programs of one worker under one layout.

    Args:
        worker: this worker's id.
        layout: routes and stages.
        compute: the layers of this worker.
        transport: its links.
        activity: told of every wait.
        trace: records every action.
    """

    def __init__(
        self,
        worker: int,
        layout: Layout,
        compute: Compute,
        transport: Transport,
        activity: Activity,
        trace: TraceRecorder,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._compute = compute
        self._transport = transport
        self._activity = activity
        self._trace = trace
        self._position: dict[tuple[int, int], int] = {
            (hop.stage, microbatch): index
            for microbatch, route in enumerate(layout.routes)
            for index, hop in enumerate(route)
            if hop.worker == worker
        }

    def run(
        self,
        program: Program,
        batches: Batches,
        *,
        step: int,
        attempt: int,
        sends: list[Handle],
        before_action: Callable[[Action], None],
        on_layer_done: Callable[[int], None],
        on_computed: Callable[[Action, range, int], None] = lambda action, layers, start_ns: None,
        train: bool = True,
    ) -> None:
        """Runs a program to its end.

        Args:
            program: this worker's actions.
            batches: tokens and targets of the step's micro-batches.
            step, attempt: part of every frame's tag.
            sends: gets the handles of all sends; their buffers stay alive in them.
            before_action: called before each action.
            on_layer_done: called with each layer once its last gradient of the step has been added here; at the
                beginning for one that is held here, but runs elsewhere.
            on_computed: called with each action, its layers and when it began (monotonic, after its input had come),
                once it is computed and before its output leaves; an emulated device makes the action last here.
            train: False runs forward actions for evaluation, on tags of their own.
        """
        forward_channel = Channel.ACTIVATION if train else Channel.EVALUATION
        remaining = self._contributions(program)
        local: dict[tuple[Channel, int, int], torch.Tensor] = {}

        def pass_on(hop: Hop, channel: Channel, microbatch: int, value: torch.Tensor) -> None:
            if hop.worker == self._worker:
                local[channel, microbatch, hop.stage] = value
            else:
                tag = Tag(channel, step, attempt, microbatch, hop.stage)
                sends.append(self._transport.send(hop.worker, tag, value))

        def take(source: Hop, own: Hop, channel: Channel, microbatch: int) -> torch.Tensor:
            if source.worker == self._worker:
                return local.pop((channel, microbatch, own.stage))
            handle = self._transport.recv(source.worker, Tag(channel, step, attempt, microbatch, own.stage))
            if not handle.done:
                label = self._activity.label
                self._activity.wait(label, (source.worker,))
                self._transport.wait(handle, WAIT_TIMEOUT_S)
                self._activity.compute(label)
            elif handle.error is not None:
                raise handle.error
            assert handle.result is not None
            return handle.result

        if train:
            for layer in sorted((layer for layer, count in remaining.items() if count == 0), reverse=True):
                on_layer_done(layer)  # others run it for every micro-batch, but its owners wait for this worker's sum
        for action in program:
            before_action(action)
            asked_ns = time.monotonic_ns()
            route = self._layout.routes[action.microbatch]
            index = self._position[action.stage, action.microbatch]
            hop = route[index]
            previous = route[index - 1] if index > 0 else None
            following = route[index + 1] if index + 1 < len(route) else None
            layers = range(hop.start, hop.stop)
            if action.kind == "F":
                targets = None
                if previous is None or following is None:
                    tokens, targets = batches(step, action.microbatch)
                value = tokens if previous is None else take(previous, hop, forward_channel, action.microbatch)
                start_ns = time.monotonic_ns()
                output = self._compute.forward(
                    layers, action.microbatch, value, None if following is not None else targets, train=train
                )
                on_computed(action, layers, start_ns)
                if following is not None:
                    pass_on(following, forward_channel, action.microbatch, output)
            else:
                gradient = None
                if following is not None and action.kind != "W":
                    gradient = take(following, hop, Channel.GRADIENT, action.microbatch)
                start_ns = time.monotonic_ns()
                if action.kind == "W":
                    self._compute.backward_weights(layers, action.microbatch)
                    result = None
                elif action.kind == "I":
                    result = self._compute.backward_input(layers, action.microbatch, gradient)
                else:
                    result = self._compute.backward(layers, action.microbatch, gradient)
                on_computed(action, layers, start_ns)
                if previous is not None and action.kind != "W":
                    assert result is not None
                    pass_on(previous, Channel.GRADIENT, action.microbatch, result)
                if action.kind != "I":
                    for layer in reversed(layers):
                        remaining[layer] -= 1
                        if remaining[layer] == 0:
                            on_layer_done(layer)
            if self._trace.enabled:
                self._trace.add("wait", "wait", asked_ns, start_ns, {"for": str(action)})
                self._trace.add(str(action), ACTION, start_ns, time.monotonic_ns(), {"step": step})
            self._transport.poll()

    def _contributions(self, program: Program) -> dict[int, int]:
        """How many gradients this worker will add to each layer that it holds."""
        remaining = dict.fromkeys(self._compute.layers, 0)
        for action in program:
            if action.kind in ("B", "W"):
                hop = self._layout.routes[action.microbatch][self._position[action.stage, action.microbatch]]
                for layer in range(hop.start, hop.stop):
                    remaining[layer] += 1
        return remaining
