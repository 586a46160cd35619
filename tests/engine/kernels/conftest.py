"""Triton's interpreter, without what it does again and again."""

import os
from dataclasses import replace
from typing import Any

import pytest

from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.tiles import Tile
from models.weights.block_formats import Kind

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton import language
        from triton.runtime import interpreter

        from tests.engine.kernels import quick, quick_calls
    except ImportError:
        pass
    else:
        # Shapes, types and what numpy calls them are few, and are made anew with every number otherwise.
        make_type, make_tensor = language.core.block_type.__init__, language.core.tensor.__init__
        types: dict[Any, dict[str, Any]] = {}
        shapes: dict[Any, dict[str, Any]] = {}
        numpy_types: dict[Any, Any] = {}
        numpy_type = interpreter._get_np_dtype

        def typed(self: Any, element: Any, shape: Any) -> None:
            key = element.name, *[getattr(size, "value", size) for size in shape]
            if key not in types:
                make_type(self, element, shape)
                types[key] = dict(self.__dict__)
            self.__dict__.update(types[key])

        def tensor_of(self: Any, handle: Any, type: Any) -> None:
            if type.name not in shapes:
                make_tensor(self, handle, type)
                shapes[type.name] = {name: value for name, value in self.__dict__.items() if name != "handle"}
            self.__dict__.update(shapes[type.name])
            self.handle = handle

        def numpy_type_of(type: Any) -> Any:
            if type.name not in numpy_types:
                numpy_types[type.name] = numpy_type(type)
            return numpy_types[type.name]

        broadcast = interpreter.TritonSemantic.broadcast_impl_value

        def broadcast_unless_alike(self: Any, left: Any, right: Any) -> Any:
            if (
                left.type.is_block()
                and right.type.is_block()
                and left.type.shape.values == right.type.shape.values
            ):
                return left, right
            return broadcast(self, left, right)

        interpreter.TritonSemantic.broadcast_impl_value = broadcast_unless_alike
        language.core.block_type.__init__ = typed
        language.core.tensor.__init__ = tensor_of
        interpreter._get_np_dtype = numpy_type_of

        # Indices are small here and hashes may wrap: to look for overflows in every sum takes a third of the rest.
        interpreter.interpreter_builder.options = replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
        quick.install()
        quick_calls.install()


LARGE = Tile(folds=1, warps=2, tiles=4, ahead=1)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut plain products into few programs, whose number is what takes the interpreter its time.

    Steps of test_rows.py and test_fused.py have the usual cuts.
    """
    usual = KernelConfigs._tile

    def tile(
        self: KernelConfigs, shape: str, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None
    ) -> Tile:
        return LARGE if kind is None else usual(self, shape, rows, outputs, inputs, gated, kind)

    monkeypatch.setattr(KernelConfigs, "_tile", tile)
