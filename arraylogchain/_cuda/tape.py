"""Launches of a product that were worked out once, launched again with other pointers.

They depend on shapes, strides and dtypes alone, and working them out takes the host longer than
the device takes for what they launch where products are small. So a first call on such arrays is
recorded: what memory it asks for, and where in which array each pointer of each launch points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch, is_struct

# Products in more steps take a device longer than the host; and tapes that are kept.
_MOST_STEPS, _MOST_TAPES = 64, 256


@dataclass
class Tape:
    """What a call does, and which of its arrays are its results.

    Attributes
    ----------
    steps : list
        Shapes and dtypes of memory; launches, each with the places of its pointers: the number of
        the argument, that of the array, of those that are given and then those that are made, and
        the bytes from its beginning.
    results : list of int or None
        Numbers of arrays.
    is_tuple : bool
    """

    steps: list[tuple[Any, Any]]
    results: list[int | None] = field(default_factory=list)
    is_tuple: bool = False

    def play(self, device: Device, given: Sequence[Array]) -> Any:
        """Do the same with other arrays."""
        arrays, pointers = list(given), [device.pointer(x) for x in given]
        for first, second in self.steps:
            if isinstance(first, Launch):
                arguments = list(first.arguments)
                for at, array, offset in second:
                    arguments[at] = np.uint64(pointers[array] + offset)
                device.run(first.with_arguments(tuple(arguments)))
            else:
                arrays.append(device.empty(first, second))
                pointers.append(device.pointer(arrays[-1]))
        results = tuple(None if i is None else arrays[i] for i in self.results)
        return results if self.is_tuple else results[0]


class _Recorder:
    """A device that makes a tape of what it is asked for; None if that cannot be repeated."""

    def __init__(self, device: Device, given: Sequence[Array]) -> None:
        self.device, self.tape = device, Tape([])
        # Where arrays begin and end; of those that are given nothing but the beginning is used.
        self.places = [(begin := device.pointer(x), begin + 1) for x in given]
        self.is_whole = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        x = self.device.empty(shape, dtype)
        begin = self.device.pointer(x)
        self.places.append((begin, begin + int(x.nbytes)))
        self.tape.steps.append((shape, dtype))
        return x

    def run(self, launch: Launch) -> None:
        self.device.run(launch)
        if len(self.tape.steps) > _MOST_STEPS:
            return
        arguments, pointers = list(launch.arguments), []
        for at, x in enumerate(arguments):
            if is_struct(x):
                arguments[at] = x.copy()  # it may be changed and launched again
            elif x is not None and not isinstance(x, np.generic):
                array, offset = self._find(x)
                pointers.append((at, array, offset))
                arguments[at] = None
        self.tape.steps.append((launch.with_arguments(tuple(arguments)), pointers))

    def finish(self, found: Any) -> Tape | None:
        """Return the tape of a call that has returned this."""
        self.tape.is_tuple = isinstance(found, tuple)
        results = found if self.tape.is_tuple else (found,)
        self.tape.results = [None if x is None else self._find(x)[0] for x in results]
        return self.tape if self.is_whole and len(self.tape.steps) <= _MOST_STEPS else None

    def _find(self, x: Array) -> tuple[int, int]:
        """Return the number of the latest array that x is in, and where it begins there."""
        pointer = self.device.pointer(x)
        for number in reversed(range(len(self.places))):
            begin, end = self.places[number]
            if begin <= pointer < end:
                return number, pointer - begin
        self.is_whole = False  # it was made by array operations
        return 0, 0


def call(function: Callable[..., Any], ctx: Context, *args: Any, **options: Any) -> Any:
    """Return what an implementation by kernels does, as it was recorded if it was."""
    device = ctx.kernels
    given = [x for x in args if hasattr(x, "dtype")]
    pointers = [device.pointer(x) for x in given]
    key = (
        function,
        ctx.result_name,
        *((x.dtype, tuple(x.shape), device.strides(x)) for x in given),
        # Arrays that are the same one may be others the next time.
        *map(pointers.index, pointers),
        *(x for x in args if not hasattr(x, "dtype")),
        *options.items(),
    )
    tapes = device.remembered.tapes
    tape = tapes.get(key)
    if tape is not None:
        return tape.play(device, given)
    if key in tapes:
        return function(ctx, *args, **options)
    recorder = _Recorder(device, given)
    found = function(replace(ctx, kernels=recorder), *args, **options)
    if len(tapes) >= _MOST_TAPES:
        tapes.clear()
    tapes[key] = recorder.finish(found)
    return found
