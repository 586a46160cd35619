"""Build hook: compiles the native kernels into the wheel, or into the source tree of an editable install.

Without a compiler the package is built all the same, without the library; `chatterm doctor` then says so.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "engine/kernels/native"


class NativeKernels(BuildHookInterface[Any]):
    """See https://hatch.pypa.io/latest/plugins/build-hook/custom/."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag if there is a library. Never fails for want of one."""
        if self.target_name != "wheel":
            return
        module = _compile_module(Path(self.root) / NATIVE / "compile.py")
        try:
            library = module.compile_library()
        except module.CompileError as error:
            self.app.display_warning(
                f"The native kernels were not built: {error}. chatterm works without them."
            )
            return
        build_data["artifacts"].append(f"/{NATIVE}/{library.name}")
        build_data["pure_python"] = False
        # ctypes loads the library: it fits every Python of the platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _compile_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
