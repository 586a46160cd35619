"""The smallest launch, which tells whether Triton works."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.triton.trial import runs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_it_runs() -> None:
    assert runs(DEVICE)
