"""GroupPool against a plain model of what must be true."""

import random

import pytest

from engine.cache.group_pool import GroupPool
from engine.cache.window import Window


def test_the_least_recently_used_slot_is_taken_back_first_and_a_spared_one_last() -> None:
    pool = GroupPool(3, Window(4, 4))
    for block in (10, 11, 12):
        pool.take(block)
    for now, block in enumerate((11, 10, 12)):
        pool.release(block, now)
    pool.spare({11: 1})
    assert [pool.take(block) for block in (20, 21, 22)] == [10, 12, 11]
    with pytest.raises(IndexError):
        pool.take(23)
    pool.check([20, 21, 22])


def test_a_forgotten_block_leaves_its_id_to_one_that_is_not_spared() -> None:
    pool = GroupPool(2, Window(4, 4))
    pool.spare({5: 1})
    pool.take(5)
    pool.release(5, now=1)
    pool.drop(5)
    pool.forget(5)
    for block, now in ((5, 2), (6, 3)):
        pool.take(block)
        pool.release(block, now)
    assert pool.take(7) == 5


def test_an_equal_block_takes_over_the_slot_and_its_holders() -> None:
    pool = GroupPool(2, Window(4, 4))
    pool.take(5)
    slot = pool.slot(5)
    pool.move(5, 1)
    assert (pool.slot(5), pool.slot(1)) == (pool.blank, slot)
    pool.release(1, now=1)
    assert pool.room() == 2
    pool.check([])


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_agree_with_a_plain_model(seed: int) -> None:
    choose = random.Random(seed)
    slots, blocks = choose.randint(1, 6), choose.randint(6, 12)
    pool = GroupPool(slots, Window(4, 4))
    refs: dict[int, int] = {}
    used: dict[int, int] = {}
    spared: dict[int, int] = {}
    for now in range(500):
        block = choose.randrange(blocks)
        unheld = {key: used[key] for key in refs if not refs[key]}
        match choose.choice(["take", "hold", "release", "drop", "move", "spare"]):
            case "take" if block not in refs:
                if len(refs) < slots:
                    assert pool.take(block) is None
                elif unheld:
                    loser = min(unheld, key=lambda key: (spared.get(key, 0), unheld[key], key))
                    assert pool.take(block) == loser
                    del refs[loser], used[loser]
                else:
                    with pytest.raises(IndexError):
                        pool.take(block)
                    continue
                refs[block], used[block] = 1, 0
            case "hold" if block in refs:
                pool.hold(block)
                refs[block] += 1
            case "release" if refs.get(block):
                pool.release(block, now)
                refs[block] -= 1
                used[block] = now
            case "drop" if not refs.get(block):
                pool.drop(block)
                refs.pop(block, None)
                used.pop(block, None)
            case "move" if refs.get(block) and len(refs) < blocks:
                target = choose.choice([other for other in range(blocks) if other not in refs])
                pool.move(block, target)
                refs[target], used[target] = refs.pop(block), used.pop(block)
            case "spare":
                spared = {other: choose.randint(1, 2) for other in range(blocks) if choose.random() < 0.3}
                pool.spare(dict(spared))
        pool.check([other for other, count in refs.items() for _ in range(count)])
        assert pool.room() == slots - sum(count > 0 for count in refs.values())
        assert {other for other in range(blocks) if other in pool} == refs.keys()
