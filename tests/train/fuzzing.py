"""Random invalid command lines, configurations, recipe texts and run folders, each from a seed."""

import json
import os
import random as randomness
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import torch
from safetensors.torch import save_file

from quaver.recipes import RECIPES
from quaver.train import checkpoint
from quaver.train.config import TrainConfig, read_toml, to_toml
from quaver.train.loop import run_training
from quaver.train.model_config import MODELS
from tests.train.conftest import MakeConfig

Random = randomness.Random

NUMBERS = ["-1", "0", "1", "2", "3", "7", "1000", "2147483648", "9223372036854775808", "1000000000000", "9" * 40]
NUMBERS += ["-" + "9" * 30, "9" * 5000, "0x10", "1e3", "١٢", "²", "", " ", "+1", "1_0", "None"]
REALS = ["nan", "inf", "-inf", "-0.0", "1e308", "1e-320", "1e999", "0.5", "-1", "1", *NUMBERS]
WORDS = ["", " ", "a" * 5000, "é", "日本", "\udcff", "a\0b", "--", "-", "%s%n", "${HOME}", "[bold]", "\x1b[31m", "~"]
WORDS += ["../..", "\x7f", "a/b\n"]
#: Models with fast steps, and one that fits into no machine's memory.
SIZES = [*(name for name in MODELS if name.endswith(("nano", "tiny"))), "llama3-70b", "", "é", "tiny "]
DEVICES = ["meta", "hpu", "mps", "cuda:-1", "cpu:0", "cuda:²", "xla", "", "vulkan", "cpu:99", "é", "cpu:"]
LITERALS = ["1", "-1", "1" * 4000, "1e999", "nan", "'x'", "'e4m3'", "b'x'", "None", "True", "[]", "{}", "{[]:1}"]
LITERALS += [
    "{1,2}",
    "(1,)",
    "...",
    "1j",
    "-" * 1000 + "1",
    "-" * 300 + "1",
    "(" * 300 + ")" * 300,
    "'\\d'",
    "x",
    "f()",
]
LITERALS += ["[" * 150 + "]" * 150, "10**10**10", "*a", "'\\ud800'", "1" + "+1j" * 50, "not 1", "lambda: 0", "f'{1}'"]
LITERALS += ['"""', "1;2", "f()", "\0", "1000000000000", "-" * 200 + "x"]
#: Values of a configuration in TOML.
VALUES = [*LITERALS, "0x" + "f" * 5000, "1979-05-27", "[[[]]]", "[" * 5000 + "]" * 5000, "{a={b=1}}", '"\\u0000"', '""']
VALUES += ["[1, 'a']", "true", "-0.0", "inf", "'''", '"\\ud800"', "9" * 5000, "9" * 400, '"' + "x" * 9000 + '"']
#: Lines of a metrics file.
RECORDS = ["[]", "{}", "3", "null", '"step"', '{"step": "1"}', '{"step": 1}', '{"step": 1e400, "seconds": 1}', ""]
RECORDS += ['{"step": 1, "seconds": NaN, "loss": 1}', '{"step": -5, "seconds": 1, "loss": 2, "x": 3}', "[" * 9999, "é"]
RECORDS += ['{"step": 1, "seconds": 1, "loss": []}', '{"step": 1, "seconds": 1, "validation_loss": Infinity}']
RECORDS += ["{" * 9999, '{"a":' * 9999]
#: Pieces that go into a text where they do not belong.
PIECES = ["", "(", ")", "=", ",", '"', "\n", "é", "\0", "[" * 99]


@dataclass(frozen=True)
class Place:
    """A folder with a text, a configuration, two runs, and things that are no files."""

    root: Path
    # The configuration that every run begins with.
    config: Path
    # A run of bytes and one of byte pairs, two steps each.
    runs: tuple[Path, Path]

    def paths(self) -> list[str]:
        odd = ["fifo", "loop", "folder", "empty", "binary", "missing", "closed", "long"]
        return [str(self.root / name) for name in odd] + ["/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "."]


def place(root: Path, make_config: MakeConfig) -> Place:
    """Make the files; `root / "a" / "b"` is to be the working folder, so that its parents are inside `root`."""
    (root / "a" / "b").mkdir(parents=True)
    config = root / "base.toml"
    base = make_config(steps=2, validate_every=0, validation_batches=1, keep=0)
    config.write_text(to_toml(base), encoding="utf-8")
    learned = {"byte": {}, "bpe": {"vocab": 300}}
    configs = [replace(base, out=str(root / name), tokens=name, **options) for name, options in learned.items()]
    runs = [run_training(config).folder for config in configs]
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to(root / "loop")
    (root / "folder").mkdir()
    (root / "empty").touch()
    (root / "binary").write_bytes(bytes(range(256)) * 9)
    (root / "closed").write_text("text " * 99)
    (root / "closed").chmod(0)
    return Place(root, config, (runs[0], runs[1]))


def recipe(random: Random) -> str:
    """A recipe's text, more or less."""
    name = random.choice([*RECIPES, "mxfp9", "", "bf16 ", "__import__", "Bf16"])
    options = ["history", "margin", "format", "power_of_two", "attention", "weight_2d", "x", "", "é", "**a", "history"]
    given = [f"{random.choice(options)}={random.choice(LITERALS)}" for _ in range(random.randrange(3))]
    text = f"{name}({', '.join(given)})" if given or random.random() < 0.3 else name
    return mangled_text(random, text) if random.random() < 0.3 else text


def mangled_text(random: Random, text: str) -> str:
    """Some characters lost, doubled or replaced."""
    letters = list(text)
    for _ in range(random.randrange(1, 4)):
        spot = random.randrange(len(letters) + 1)
        letters[spot : spot + random.randrange(3)] = random.choice(PIECES)
    return "".join(letters)


def mangled_bytes(random: Random, data: bytes) -> bytes:
    """Bits flipped, bytes cut off, or something else altogether."""
    kind = random.randrange(5)
    if kind == 0 or not data:
        return random.choice([b"", b"{}", b"[]", b"null", b"[" * 99_999, b"\xff\xfe", b"1" * 5000, b'{"step": "1"}\n'])
    if kind == 1:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 5])):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def options(random: Random, where: Place) -> list[str]:
    """A few options of a training with values of all kinds."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    arguments: list[str] = []
    others = [field for field in fields(TrainConfig) if field.name != "steps"]
    for field in random.sample(others, random.randrange(1, 4)):
        kind = get_args(hints[field.name])[0]
        pool = {int: NUMBERS, float: REALS}.get(kind, [*WORDS, *where.paths()])
        value = random.choice(pool)
        if field.name == "recipe":
            value = recipe(random)
        if field.name == "model":
            value = random.choice(SIZES)
        if field.name == "device":
            value = random.choice(DEVICES)
        if field.name == "framework":
            value = random.choice(["jax", "torch", "tensorflow"])
        arguments += [f"--{field.name.replace('_', '-')}", value]
    return arguments


def train(random: Random, where: Place, fresh: Path) -> list[str]:
    """A new run of one step."""
    begin = ["train", "--config", str(where.config), "--out", str(fresh), "--steps", "1", "--quiet"]
    return begin + options(random, where)


def configured(random: Random, where: Place, fresh: Path) -> list[str]:
    """A new run from a configuration that was mangled."""
    lines = where.config.read_text(encoding="utf-8").splitlines()
    for _ in range(random.randrange(1, 3)):
        spot = random.randrange(1, len(lines))
        key = random.choice([lines[spot].split(" = ")[0], "x", "steps", "a.b", '""'])
        if key != "steps":
            lines[spot] = random.choice([f"{key} = {random.choice(VALUES)}", f"[{key}]", f"[[{key}]]", key, lines[1]])
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    file = fresh.with_suffix(".toml")
    file.write_bytes(mangled_bytes(random, data) if random.random() < 0.3 else data)
    source = str(file) if random.random() < 0.9 else random.choice(where.paths())
    return ["train", "--config", source, "--out", str(fresh), "--steps", "1", "--quiet"]


def mangled_run(random: Random, where: Place, fresh: Path) -> list[str]:
    """A damaged folder of a run, to resume or to generate from."""
    shutil.copytree(random.choice(where.runs), fresh)
    config = replace(TrainConfig(**read_toml(fresh / "config.toml")), out=str(fresh))
    (fresh / "config.toml").write_text(to_toml(config), encoding="utf-8")
    for _ in range(random.choice([1, 1, 2])):
        random.choice([damage, damage, damage, put_in_place, rename, forge, write_metrics])(random, where, fresh)
    if random.random() < 0.5:
        return ["train", "--resume", "--out", str(fresh), "--steps", "3", "--quiet"]
    return ["generate", str(fresh), "--prompt", "7 times", "--tokens", "2"]


def some_file(random: Random, fresh: Path) -> Path:
    return random.choice(sorted(path for path in fresh.rglob("*") if path.is_file()) or [fresh / "config.toml"])


def damage(random: Random, where: Place, fresh: Path) -> None:
    path = some_file(random, fresh)
    if path.exists():
        path.write_bytes(mangled_bytes(random, path.read_bytes()))


def put_in_place(random: Random, where: Place, fresh: Path) -> None:
    """Something that is no file, or another file, under a file's name."""
    path = some_file(random, fresh)
    path.unlink(missing_ok=True)
    kind = random.randrange(5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(random.choice(where.paths()))
    elif kind == 3:
        shutil.copy(some_file(random, where.runs[0]), path)


def rename(random: Random, where: Place, fresh: Path) -> None:
    names = ["step-²", "step-000009", "step--00001", "step-000001", "step-9" + "0" * 19, ".step-000002.partial", "text"]
    target = fresh / random.choice(names)
    if not target.exists() and (fresh / "step-000002").is_dir():
        (fresh / "step-000002").rename(target)


def forge(random: Random, where: Place, fresh: Path) -> None:
    """A checkpoint with digests that are right and tensors that are not, or a state of another shape."""
    path = fresh / "step-000002"
    if not all((path / name).is_file() for name in (*checkpoint.FILES, "state.json")):
        return
    name = random.choice(["norm.weight", "x", "", "/", "embedding.weight/exp_avg", "layers.0.mlp.up_proj.history"])
    dtype = random.choice([torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64, torch.bool, torch.int8])
    shape = random.choice([(), (0,), (32,), (2, 2)])
    if random.random() < 0.7:
        save_file({name: torch.zeros(shape, dtype=dtype)}, path / random.choice(checkpoint.FILES))
    try:
        state = json.loads((path / "state.json").read_text())
        key = random.choice(["format", "step", "model", "text", "config", "seed"])
        state[key] = random.choice([None, [], {}, -1, "2", 2.5, 10**30, {"recipe": []}, [[]], True])
    except (ValueError, TypeError, RecursionError):
        return
    checkpoint.write_state(path, state)


def write_metrics(random: Random, where: Place, fresh: Path) -> None:
    path = fresh / "metrics.jsonl"
    if path.is_file() and not path.is_symlink():
        path.write_text("".join(f"{random.choice(RECORDS)}\n" for _ in range(random.randrange(1, 4))))


def generate(random: Random, where: Place, fresh: Path) -> list[str]:
    """Text from a sound run with odd options, or from something that is none."""
    run = str(random.choice([*where.runs, *where.runs, *where.paths()]))
    arguments = ["generate", run, "--prompt", random.choice([*WORDS, "7 times"]), "--tokens", "2"]
    pools = {"tokens": [n for n in NUMBERS if n != "1000"], "temperature": REALS, "top-k": NUMBERS, "top-p": REALS}
    pools |= {"seed": NUMBERS, "cache": [*WORDS, "paged"], "device": DEVICES, "recipe": [recipe(random)]}
    for name in random.sample(sorted(pools), random.randrange(1, 4)):
        arguments += [f"--{name}", random.choice(pools[name])]
    return arguments


def plan(random: Random, where: Place, fresh: Path) -> list[str]:
    gpu, model = random.choice(["h100", "b200", "l40s", *WORDS]), random.choice([*MODELS, *WORDS])
    arguments = ["plan", "--gpu", gpu, "--model", model]
    arguments += ["--recipe", recipe(random)]
    for name in random.sample(["tokens", "micro-batches"], random.randrange(3)):
        arguments += [f"--{name}", random.choice(NUMBERS)]
    return arguments + random.sample(["--fused", "--json"], random.randrange(3))


def compare(random: Random, where: Place, fresh: Path) -> list[str]:
    """A comparison that cannot begin: its runs would be separate processes."""
    shutil.copytree(where.runs[0], fresh / "bf16-seed0")
    arguments = ["compare", "--config", str(where.config), "--quiet", *options(random, where)]
    names = ",".join(recipe(random) for _ in range(random.randrange(4)))
    arguments += ["--recipes", names + random.choice(["", "," * 9999])]
    arguments += random.choice([["--seeds", random.choice(NUMBERS)], ["--jobs", random.choice(NUMBERS)], []])
    return [*arguments, "--out", str(fresh)]


def anything(random: Random, where: Place, fresh: Path) -> list[str]:
    """Words in no order; a training that would be in order is given a model that is not."""
    words = ["train", "generate", "doctor", "plan", "compare", "--help", "--steps", "--quiet", "--resume", "--out"]
    words += WORDS
    chosen = [random.choice(words) for _ in range(random.randrange(5))]
    return chosen + (["--model", "é"] if {"train", "compare"} & set(chosen) else [])


KINDS: dict[Callable[[Random, Place, Path], list[str]], int] = {
    train: 6,
    configured: 4,
    mangled_run: 8,
    generate: 4,
    plan: 2,
    compare: 2,
    anything: 1,
}


def command_line(seed: int, where: Place, fresh: Path) -> list[str]:
    """The arguments of case `seed`; `fresh` is a name that it may use."""
    random = Random(seed)
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    return kind(random, where, fresh)
