"""docs/families.md against the code."""

import re
from pathlib import Path

from engine.execute.compatibility import not_fused, not_native
from engine.machine.shapes import CONFIGS, known_shape
from models.families.registry import FAMILIES
from models.hub.catalogue import names

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if (line.startswith("|") and "For" in line) or "GPT2LMHeadModel" in line
]


def test_every_family_has_a_row() -> None:
    listed = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[1])}
    assert listed == {name for family in FAMILIES for name in family.architectures} - {"Ernie4_5_ForCausalLM"}
    formats = {row[2].strip("`") for row in ROWS} - {""}
    assert formats == {family.gguf_architecture for family in FAMILIES} - {None}


def test_what_runs_where_is_what_the_compatibility_check_says() -> None:
    seen = set()
    for row in ROWS:
        for name in re.findall(r"`([^`]+)`", row[3]):
            assert name in names()
            spec = known_shape(name) if name in CONFIGS else None
            if spec is not None:
                seen.add(spec.architecture)
                assert row[4] == ("PyTorch" if not_native(spec) else "native"), name
                assert row[5] == ("PyTorch" if not_fused(spec) else "fused"), name
    assert seen == {known_shape(name).architecture for name in CONFIGS}
