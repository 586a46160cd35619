"""What a recorded step reads, on a CPU: its memory never moves, and nothing of an earlier step is left in it."""

import torch

from engine.execute.cuda.input_buffers import StagedInputs


def test_every_step_reads_what_was_sent_for_it_at_the_same_place() -> None:
    given = StagedInputs((3, 1, 5), torch.device("cpu"))
    places = [part.data_ptr() for part in given.parts]
    assert [len(part) for part in given.parts] == [3, 1, 5]
    assert all((place - places[0]) % 16 == 0 for place in places)
    for number in (1, 2, 3):
        first, _, third = given.begin()
        assert (first == 0).all()
        assert (third == 0).all()
        first[:number] = number
        third[-1] = 10 * number
        before = [part.tolist() for part in given.parts]
        assert before[2][-1] == 10 * (number - 1)  # not before it is sent
        given.send()
        assert [part.tolist() for part in given.parts] == [
            [number] * number + [0] * (3 - number),
            [0],
            [0, 0, 0, 0, 10 * number],
        ]
    assert [part.data_ptr() for part in given.parts] == places


def test_what_is_being_copied_is_not_written_to() -> None:
    """A copy that nobody waits for reads host memory later."""
    given = StagedInputs((4,), torch.device("cpu"))
    (first,) = given.begin()
    first.fill(1)
    given.send()
    (second,) = given.begin()
    second.fill(2)
    assert (first == 1).all()
