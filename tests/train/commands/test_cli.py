import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from quaver import __version__ as version
from quaver.recipes import RECIPES
from quaver.train.commands import doctor
from quaver.train.commands.cli import app
from quaver.train.commands.doctor import NEEDS, Device, implementation_text
from quaver.train.config import TrainConfig, read_toml, to_toml
from quaver.train.metrics import losses, read
from quaver.train.torch import learner
from tests.train.conftest import MakeConfig


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def toml(make_config: MakeConfig, tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(to_toml(make_config()), encoding="utf-8")
    return path


def test_train_names_its_plot_and_command_line_options_take_precedence(toml: Path, tmp_path: Path) -> None:
    result = quaver("train", "--config", toml, "--steps", 4, "--quiet")
    assert result.exit_code == 0, result.output
    assert "validation loss" in result.stdout and str(tmp_path / "run" / "loss.png") in result.stdout
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    assert read_toml(tmp_path / "run" / "config.toml")["steps"] == 4


def test_resume_takes_its_options_from_the_run(toml: Path, tmp_path: Path) -> None:
    assert quaver("train", "--config", toml, "--steps", 4, "--quiet").exit_code == 0
    assert quaver("train", "--auto-resume", "--out", tmp_path / "run", "--quiet").exit_code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = quaver("train", "--resume", "--out", tmp_path / "run", "--steps", 6, "--quiet")
    assert result.exit_code == 0 and "other options: steps 6 (was 4)" in result.stderr, result.output
    assert list(losses(read(tmp_path / "run" / "metrics.jsonl"))) == [1, 2, 3, 4, 5, 6]


def test_each_machine_reports_errors_of_its_ranks_before_all_connect(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    for rank, local, message in (
        ("0", "0", "threads is 1000, "),
        ("8", "0", "rank 8: threads is 1000, "),
        ("9", "1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        result = quaver("train", "--config", toml, "--batch", 16, "--threads", 1000)
        assert result.exit_code == 1 and result.stderr.startswith(message) and bool(result.stderr) == bool(message)


def test_text_takes_several_paths(toml: Path, text: Path, tmp_path: Path) -> None:
    files = [text / "00.txt", text / "01.txt", text / "02.txt"]
    result = quaver("train", "--config", toml, "--text", *files, "--steps", 1, "--quiet")
    assert result.exit_code == 0, result.output
    assert read_toml(tmp_path / "run" / "config.toml")["text"] == tuple(map(str, files))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxpf8"], "did you mean 'mxfp8'?"),
        (["--recipe", "delayed(histori=3)"], "did you mean 'history'?"),
        (
            ["--recipe", "nvfp4, bf16"],
            "does not say where 'nvfp4' ends: each but the last has until STEP, until ",
        ),
        (["--recipe", "nvfp4 until 85%"], "does not say what follows 'nvfp4 until 85%'; write the recipe of the steps"),
        (["--framework", "jaxx"], "framework 'jaxx' is not known; did you mean 'jax'?"),
        (["--text", "nowhere.txt"], "there is no text file nowhere.txt"),
        (["--sequence", "100000"], "the text is too short"),
        (["--resume"], "holds no run to resume"),
        (["mxfp8"], "'mxfp8' belongs to no option"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
    ],
)
def test_bad_input_gives_one_clear_error_and_leaves_no_files(
    toml: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = quaver("train", "--config", toml, "--quiet", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\xff\xfe\xfd", "is not text"), (b"ab", "too short")]
)
def test_a_bad_text_gives_one_clear_error(toml: Path, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    result = quaver("train", "--config", toml, "--text", tmp_path / "x.txt", "--quiet")
    assert result.exit_code == 1 and message in result.stderr


def test_a_loss_that_runs_away_gives_one_clear_error(toml: Path) -> None:
    result = quaver("train", "--config", toml, "--lr", 1e30, "--clip", 0, "--quiet")
    assert result.exit_code == 1 and "stopped at step" in result.stderr and "not finite" in result.stderr


def test_a_misspelt_option_is_suggested(toml: Path) -> None:
    result = quaver("train", "--reciepe", "mxfp8")
    assert result.exit_code == 2 and "--recipe" in result.stderr


@pytest.mark.usefixtures("forked_runs")
def test_compare_reports_and_names_its_pictures(toml: Path, tmp_path: Path) -> None:
    result = quaver("compare", "--config", toml, "--recipes", "mxfp8", "--steps", 2, "--quiet")
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()[2:5]] == [
        ["bf16", "1"],
        ["null", "1"],
        ["mxfp8", "1"],
    ]
    assert "one seed: no verdict" in result.stdout and "no interval" in result.stdout
    assert result.stdout.splitlines()[-1] == f"picture: {tmp_path / 'run' / 'compare.png'}"
    assert (tmp_path / "run" / "report.md").exists()


@pytest.mark.usefixtures("forked_runs")
def test_compare_in_jax_prints_paired_differences(toml: Path, tmp_path: Path) -> None:
    arguments = ["--framework", "jax", "--recipes", "tensorwise", "--steps", 2, "--jobs", 1, "--quiet"]
    result = quaver("compare", "--config", toml, *arguments)
    assert result.exit_code == 0, result.output
    report = (tmp_path / "run" / "report.md").read_text()
    row = next(line for line in report.splitlines() if line.startswith("| tensorwise"))
    assert re.search(r"\| [+-]0\.\d{4} \|  \| [\d,]+ \| one seed: no verdict \|", row) and "jax 0." in report


def test_compare_reads_files_of_any_runs(tmp_path: Path) -> None:
    for name, loss in {"a0": 2.0, "a1": 3.0, "b0": 2.1, "b1": 3.102}.items():
        lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    named = [f"{text}={tmp_path}/{text}{seed}.jsonl" for text in "ab" for seed in (0, 1)]
    result = quaver("compare", "--files", *named)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[3].endswith("2.6010  +0.1010  +0.0883 to +0.1137  different")
    result = quaver("compare", "--files", *named, "--margin", 0.2, "--out", tmp_path / "out")
    assert "equivalent to a within ±0.2 nats (n = 2)" in result.stdout
    assert result.stdout.splitlines()[-1] == f"picture: {tmp_path / 'out' / 'compare.png'}"
    result = quaver("compare", "--files", *named, "--steps", 3)
    assert result.exit_code == 1 and "leave out --steps" in result.stderr


@pytest.mark.usefixtures("forked_runs")
def test_compare_reports_a_failed_run(toml: Path) -> None:
    result = quaver("compare", "--config", toml, "--recipes", "bf16", "--lr", 1e30, "--clip", 0, "--quiet")
    assert result.exit_code == 1 and "bf16 seed 0 failed: stopped at step" in result.stderr


def test_every_option_is_on_the_command_line() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


def test_doctor_speaks_of_every_recipe() -> None:
    result = quaver("doctor")
    assert result.exit_code == 0 and all(name in result.stdout for name in (*RECIPES, "torch", "cpu"))
    assert "quaver train --framework torch runs on cpu" in result.stdout
    assert "quaver train --framework jax runs on cpu" in result.stdout


def test_doctor_names_the_allocator_advice_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for name in doctor.MALLOC:
        monkeypatch.delenv(name, raising=False)
    both = doctor.memory([])
    assert both.endswith("MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824")
    assert doctor.memory([Device("H100", (9, 0))]) == ""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1073741824")
    assert "MALLOC_MMAP_THRESHOLD_ is not set, and the other one alone ends" in doctor.memory([])
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1073741824")
    assert doctor.memory([]) == ""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert doctor.memory([]) == ""


def test_doctor_tests_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: rest for name, *rest in doctor.recipes_table([])}
    assert rows["bf16"][0] == "native" and rows["mxfp8"] == ["emulated", "no GPU; native GEMMs need sm_100 or newer"]
    assert "Each recipe was tried" in quaver("doctor").stdout
    hopper = [Device("H100", (9, 0))]
    for ran, expected in (
        ([("fprop", "native", ""), ("dgrad", "native", "")], ("native", "all three GEMMs are the GPU's")),
        (
            [("fprop", "native", ""), ("dgrad", "decoded", "no such GEMM")],
            ("partly native", "fprop native; dgrad decoded: no such GEMM"),
        ),
        (
            [(name, "decoded", "no such GEMM") for name in ("fprop", "dgrad", "wgrad")],
            ("emulated", "fprop, dgrad, wgrad decoded: no such GEMM"),
        ),
    ):
        monkeypatch.setattr(learner, "run_trial", lambda recipe, ran=ran: ran)
        assert doctor.kernels_text("mxfp8", hopper) == expected
    monkeypatch.setattr(doctor, "has", lambda framework: False)
    assert doctor.recipes_table(hopper)[1][1:] == ("not tried", "H100 could: it is sm_90")
    assert "Nothing was tried" in quaver("doctor").stdout


def test_the_version_is_printed() -> None:
    result = quaver("--version")
    assert result.exit_code == 0 and result.stdout == f"quaver {version}\n"


def test_the_module_runs_as_a_program_and_imports_only_what_a_command_needs() -> None:
    """From the first line of the interpreter on; plotting was half of the imports."""
    command = [sys.executable, "-X", "importtime", "-m", "quaver.train", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout == f"quaver {version}\n" and "quaver.train.commands.cli" in imported
    assert not imported & {"matplotlib", "torch", "jax", "triton", "transformers"}


@pytest.mark.usefixtures("forked_runs")
def test_without_a_terminal_progress_is_lines(toml: Path, tmp_path: Path) -> None:
    result = quaver("train", "--config", toml, "--steps", 60)
    steps = [int(step) for step in re.findall(r"^step (\d+) of 60  loss \d", result.stderr, re.MULTILINE)]
    assert result.exit_code == 0 and steps == [1, *range(3, 61, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not quaver("train", "--config", toml, "--steps", 63, "--resume", "--quiet").stderr
    compared = quaver("compare", "--config", toml, "--out", tmp_path / "all", "--recipes", "bf16", "--steps", 2)
    assert "run 1 of 2, bf16 seed 0: step 2 of 2  loss" in compared.stderr, compared.output


def test_a_recipe_change_is_printed_at_its_step(toml: Path, tmp_path: Path) -> None:
    result = quaver("train", "--config", toml, "--steps", 60, "--recipe", "nvfp4 until 31, bf16")
    assert result.exit_code == 0, result.output
    reported = re.findall(r"^step (\d+) of 60  loss .* tokens/s  (\w+)$", result.stderr, re.MULTILINE)
    assert ("30", "nvfp4") in reported and ("32", "bf16") in reported and ("31", "nvfp4") not in reported
    assert "from step 32 on: bf16" in result.stdout
    result = quaver("plan", "--gpu", "h100", "--model", "tiny", "--recipe", "nvfp4 until 85%, bf16")
    assert result.exit_code == 1 and "changes over a run, and here is no run" in result.stderr


def test_doctor_says_what_to_install_for_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has", lambda framework: framework == "torch")
    assert doctor.frameworks()[1] == "quaver train --framework jax needs: pip install 'quaver[train-jax]'"
    monkeypatch.setattr(doctor, "has", lambda framework: framework == "jax")
    assert doctor.gpus() == [] and "torch" not in doctor.cpu()


def test_doctor_lists_the_requirements_of_each_recipe() -> None:
    assert set(RECIPES) - set(NEEDS) == {"bf16", "mxfp6", "mxfp4"}
    hopper = [Device("H100", (9, 0))]
    ampere = [Device("A100", (8, 0))]
    assert implementation_text("rowwise", ampere) == ("emulated", "A100 is sm_80; native GEMMs need sm_89 or newer")
    assert (
        "need sm_100" in implementation_text("mxfp8", hopper)[1]
        and "could" in implementation_text("blockwise", hopper)[1]
    )
    assert implementation_text("mxfp4", [Device("B200", (10, 0))]) == (
        "emulated",
        "torch and XLA have no GEMM for its formats",
    )
    assert "no GPU" in implementation_text("delayed", [])[1] and implementation_text("bf16", [])[0] == "native"


def test_generate_prints_prompt_and_text_and_the_speed_beside_it(toml: Path, tmp_path: Path) -> None:
    assert quaver("train", "--config", toml, "--steps", 2, "--quiet").exit_code == 0
    result = quaver("generate", tmp_path / "run", "--prompt", "[bold]7", "--tokens", 40, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("[bold]7") and result.stdout.endswith("\n")
    assert "tokens/s" in result.stderr and "trained on 32 tokens at a time" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "7", "--temperature", -1], "temperature is -1.0; give 0"),
        (["--prompt", "7", "--top-k", -1], "top_k is -1"),
        (["--prompt", "7", "--top-p", 0], "top_p is 0.0"),
        (["--prompt", "7", "--tokens", 99_999], "99999 more do not fit; give --tokens 2047 or fewer"),
        (["--prompt", "7", "--cache", "pagd"], "did you mean 'paged'?"),
        (["--prompt", "7", "--recipe", "mxpf8"], "did you mean 'mxfp8'?"),
        (["--prompt", "7", "--tokens", 0], "tokens is 0; it must be at least 1"),
        (["--prompt", "7", "--seed", -1], "seed is -1"),
        (["--prompt", "7", "--device", "cuda:99"], "the device 'cuda:99' is not available"),
    ],
)
def test_generate_reports_user_mistakes_clearly(trained: Path, arguments: list[object], message: str) -> None:
    result = quaver("generate", trained, *arguments)
    assert result.exit_code == 1 and message in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_generate_without_a_run_gives_one_clear_error(tmp_path: Path) -> None:
    result = quaver("generate", tmp_path / "none", "--prompt", "7")
    assert result.exit_code == 1 and "holds no run" in result.stderr


def test_runs_are_plotted_and_other_folders_give_a_clear_error(toml: Path, tmp_path: Path) -> None:
    assert quaver("train", "--config", toml, "--steps", 3, "--quiet").exit_code == 0
    picture = tmp_path / "runs.png"
    result = quaver("plot", tmp_path / "run", tmp_path / "run", "--picture", picture)
    assert result.exit_code == 0 and str(picture) in result.stdout and picture.stat().st_size > 10_000
    result = quaver("plot", tmp_path / "run", tmp_path, "--picture", picture)
    assert result.exit_code == 1 and "holds no run with a step; give folders of quaver train" in result.stderr
