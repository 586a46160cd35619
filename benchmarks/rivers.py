"""Text like a chat model's (prose, lists, code and tables), made up of words about rivers."""

import random

NOUNS = """\
river water bank town bridge stone valley slope channel flood plain delta source mouth current bed gravel sediment
meander basin rain snow glacier spring tributary estuary tide salt marsh meadow willow heron trout boat ferry mill
wheel weir lock canal harbour trade road wall gate market square tower field orchard"""
GLUE = "the a of in to and with by from over under along between while because where which slowly often"
WORDS = NOUNS.split()
CODE = """\
def discharge(width: float, depths: list[float], speeds: list[float]) -> float:
    \"\"\"Volume of water that passes in a second, in cubic metres.\"\"\"
    slices = zip(depths, speeds, strict=True)
    step = width / len(depths)
    return sum(step * depth * speed for depth, speed in slices)  # mid-section method


for name, gauge in sorted(stations.items(), key=lambda item: item[1].height):
    if gauge.level > {limit}:
        print(f"{{name}}: {{gauge.level:.2f}} m is above the mark")
"""


def prose(rng: random.Random, sentences: int) -> str:
    made, glue = [], GLUE.split()
    for _ in range(sentences):
        words = [rng.choice(WORDS if n % 2 else glue) for n in range(rng.randint(8, 18))]
        if rng.random() < 0.3:
            at = rng.randrange(len(words))
            words[at] = f"**{words[at]}**" if rng.random() < 0.6 else f"`{words[at]}`"
        made.append(" ".join(words).capitalize() + ".")
    return " ".join(made)


def section(rng: random.Random, number: int) -> str:
    bullets = "\n".join(f"- **{rng.choice(WORDS)}**: {prose(rng, 1)}" for _ in range(6))
    steps = "\n".join(f"{n}. {prose(rng, 2)}" for n in range(1, 5))
    rows = "\n".join(
        f"| {rng.choice(WORDS)} | {rng.randint(10, 6000):,} km | {prose(rng, 1)} |" for _ in range(6)
    )
    table = f"| River | Length | Remark |\n|---|---:|---|\n{rows}"
    code = f"```python\n{CODE.replace('{limit}', str(number)).replace('{{', '{').replace('}}', '}')}```"
    parts = [
        f"## {number}. About the {rng.choice(WORDS)}",
        prose(rng, 7),
        bullets,
        prose(rng, 5),
        code,
        steps,
    ]
    return "\n\n".join([*parts, table, prose(rng, 9)])
