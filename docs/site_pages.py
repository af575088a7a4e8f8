"""Pages that `make docs` adds to those in docs: README and similar files, the API reference, and linked files.

mkdocs calls the functions named `on_...`. Links in the pages lead to files of the repository. If the file is a page of
the site, the link is rewritten to that page; otherwise the site contains a copy of the file.
"""

import ast
import os
import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages made from files outside docs.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
#: Pages of the reference, each with the public names of one module.
REFERENCE = {
    "quaver": "Recipes, specs, formats, rules",
    "quaver.recipes": "Recipes",
    "quaver.rules": "Rules: what is not worth quantizing",
    "quaver.comparison": "Compared runs",
    "quaver.torch": "PyTorch",
    "quaver.torch.optim": "PyTorch: optimizers",
    "quaver.torch.parallel": "PyTorch: several GPUs",
    "quaver.integrations.huggingface": "transformers",
    "quaver.integrations.accelerate": "accelerate",
    "quaver.integrations.lightning": "Lightning",
    "quaver.integrations.peft": "PEFT",
    "quaver.integrations.torchtitan": "torchtitan",
    "quaver.jax": "JAX",
    "quaver.jax.state": "JAX: state",
    "quaver.jax.linen": "Flax linen",
    "quaver.jax.nnx": "Flax NNX",
    "quaver.train": "Training from Python",
    "quaver.compat": "Compatibility: import names",
    "quaver.compat.checkpoints": "Compatibility: checkpoints",
    "quaver.compat.torchao.float8": "Compatibility: torchao",
    "quaver.compat.transformer_engine.pytorch": "Compatibility: Transformer Engine, PyTorch",
    "quaver.compat.transformer_engine.pytorch.optimizers": "Compatibility: Transformer Engine, optimizers",
    "quaver.compat.transformer_engine.jax": "Compatibility: Transformer Engine, JAX",
    "quaver.compat.transformer_engine.jax.flax": "Compatibility: Transformer Engine, Flax",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Fill in the two parts of the navigation that are lists: blocks in the order of their index, and the reference."""
    index = (ROOT / "docs" / "blocks" / "README.md").read_text(encoding="utf-8")
    blocks = dict.fromkeys(
        target for _, target, _ in LINK.findall(index) if "/" not in target
    )
    lists = {
        "blocks": ["blocks/README.md", *(f"blocks/{name}" for name in blocks)],
        "reference": [f"reference/{module}.md" for module in REFERENCE],
    }
    config.nav = [
        {
            title: lists.get(part, part) if isinstance(part, str) else part
            for title, part in entry.items()
        }
        if isinstance(entry, dict)
        else entry
        for entry in config.nav
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(
            File.generated(
                config, page, content=(ROOT / source).read_text(encoding="utf-8")
            )
        )
    for module, title in REFERENCE.items():
        files.append(
            File.generated(
                config, f"reference/{module}.md", content=reference(module, title)
            )
        )
    for file in [file for file in files if file.is_documentation_page()]:
        for _, target, _ in LINK.findall(plain(file.content_string)):
            add(files, config, repository_path(file.src_uri, target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt a page to Python-Markdown: links to pages of the site, and a blank line before each list."""
    if page.file.src_uri.startswith(("lab/", "files/")):
        page.meta["search"] = {"exclude": True}

    def link(match: re.Match[str]) -> str:
        path = repository_path(page.file.src_uri, match[2])
        to = os.path.relpath(site_path(path), PurePosixPath(page.file.src_uri).parent)
        return f"{match[1]}{PurePosixPath(to)}{match[3]}"

    def prose(text: str) -> str:
        text = LINK.sub(link, text)
        text = re.sub(r"^  (?=\S)", "    ", text, flags=re.MULTILINE)
        return re.sub(
            r"^(?![\s\-|#<]|\d+\. )(.+\n)(?=- )", r"\1\n", text, flags=re.MULTILINE
        )

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [prose(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, prose(markdown[at:])])


def reference(module: str, title: str) -> str:
    """Return a page of the reference: signature and docstring of each public name of a module."""
    entries = "\n\n".join(f"::: {module}.{name}" for name in public(module))
    return f"# {title}\n\n`{module}`\n\n{entries}\n"


def public(module: str) -> list[str]:
    """Read the public names of a module, without importing it: the site needs neither torch nor jax.

    These are the names in `__all__`, or if it has none, the functions that the module defines, or the classes if it
    defines no public function. Submodules are left out.
    """
    folder = ROOT / "src" / Path(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: list[str] = []
    for statement in tree.body:
        target = (
            statement.targets[0]
            if isinstance(statement, ast.Assign)
            else getattr(statement, "target", None)
        )
        value = getattr(statement, "value", None)
        if target is None or value is None or ast.unparse(target) != "__all__":
            continue
        # `__all__ += submodule.__all__`
        names += (
            public(f"{module}.{ast.unparse(value.value)}")
            if isinstance(value, ast.Attribute)
            else literal(value)
        )
    if not names:
        defined = {
            kind: [node.name for node in tree.body if isinstance(node, kind)]
            for kind in (ast.FunctionDef, ast.ClassDef)
        }
        functions = [
            name for name in defined[ast.FunctionDef] if not name.startswith("_")
        ]
        names = functions or defined[ast.ClassDef]
    names = [name for name in names if not name.startswith("_")]
    return [
        name
        for name in names
        if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()
    ]


def literal(value: ast.expr) -> list[str]:
    names: list[str] = ast.literal_eval(value)
    return names


def plain(markdown: str) -> str:
    """Without code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", markdown))


def repository_path(page: str, target: str) -> str:
    """What a link of a page leads to, from the root of the repository."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(
        page,
        page.removeprefix("files/") if page.startswith("files/") else f"docs/{page}",
    )
    return os.path.normpath(PurePosixPath(source).parent / target)


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    if (ROOT / path).is_dir():
        return f"files/{path}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def add(files: Files, config: Any, path: str) -> None:
    """Put a copy of a file, or a list of a folder's files, into the site; mkdocs tells what is not there."""
    to = site_path(path)
    if (
        files.get_file_from_path(to) is not None
        or not (ROOT / path).exists()
        or not to.startswith("files/")
    ):
        return
    if (ROOT / path).is_file():
        files.append(File.generated(config, to, abs_src_path=str(ROOT / path)))
        return
    tracked = subprocess.run(
        ["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = tracked.stdout.split()
    here = PurePosixPath(path)
    lines = [
        f"- [{PurePosixPath(name).relative_to(here)}]({PurePosixPath(name).relative_to(here.parent)})"
        for name in names
    ]
    files.append(
        File.generated(config, to, content=f"# {path}\n\n" + "\n".join(lines) + "\n")
    )
    for name in names:
        add(files, config, name)
