"""chatterm where Python lacks what Windows lacks: every module, and the important ways."""

import json
import subprocess
import sys
from pathlib import Path

from tests import without_posix
from tests.engine.tiny import write_tokenizer
from tests.models.checkpoints import tiny_qwen3, write_checkpoint


def test_every_module_and_the_important_ways_do_without_posix(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(model, tiny_qwen3(vocab_size=272, max_position_embeddings=1024))
    write_tokenizer(model)
    done = subprocess.run(
        [sys.executable, without_posix.__file__, str(model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["modules"] > 600
    assert found["lock"] == [True, False, True]
    assert found["store"]
    assert [found[name][0] for name in ("help", "doctor", "run", "sessions", "ps", "gone")] == [
        0,
        0,
        0,
        0,
        0,
        1,
    ]
    assert "4.3 GB of 8.6 GB free" in found["doctor"][1]
    assert found["run"][1]
    assert found["sessions"][1].endswith("Hi\n")
    assert "for terminals only" in found["ps"][1]
    assert "Error" not in json.dumps(found)
