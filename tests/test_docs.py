"""The public names explain themselves: what they do, what they take, what they return and what they raise."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import diffusers_omni_offload

PACKAGE = Path(diffusers_omni_offload.__file__).parent
SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def public_names() -> list[str]:
    return sorted(diffusers_omni_offload.__all__)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """(name, function or property) for what is public in a class and written in this package; what overrides something
    that has a docstring needs none."""
    for base in cls.__mro__:
        if not base.__module__.startswith(diffusers_omni_offload.__name__):
            continue
        for name, value in vars(base).items():
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            is_written = inspect.isfunction(value) or isinstance(value, property)
            if is_written and not name.startswith("_") and "__dataclass" not in getattr(value, "__qualname__", ""):
                yield name, value


def documented() -> Iterator[tuple[str, Any]]:
    """(name, function, class or property) for everything that has to have a docstring."""
    for name in public_names():
        value = getattr(diffusers_omni_offload, name)
        yield name, value
        if inspect.isclass(value):
            seen: set[str] = set()
            for member, function in members(value):
                if member not in seen:
                    seen.add(member)
                    yield f"{name}.{member}", function


DOCUMENTED = dict(documented())
FUNCTIONS = {name: value for name, value in DOCUMENTED.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in DOCUMENTED.items() if inspect.isclass(value)}


def doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def section(text: str, title: str) -> str | None:
    """The indented lines below a title; None if there is no such title."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", text, flags=re.MULTILINE)
    return None if found is None else textwrap.dedent(found[1])


def entries(text: str) -> set[str]:
    """The names that a section explains."""
    names = re.findall(r"^([\w*, ]+):", text, flags=re.MULTILINE)
    return {name.strip().lstrip("*") for line in names for name in line.split(",")}


def parameters(function: Callable[..., Any]) -> list[str]:
    is_method = "." in function.__qualname__
    return list(inspect.signature(function).parameters)[is_method:]


def is_context_manager(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(getattr(function, "__wrapped__", None))


def raised(function: Callable[..., Any]) -> set[str]:
    """The exceptions that a function's own code raises by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add(node.exc.func.id)
    return found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_there_is_a_docstring_of_sentences(name: str) -> None:
    text = doc(DOCUMENTED[name])
    assert text, f"{name} has no docstring"
    if isinstance(DOCUMENTED[name], property) or inspect.isfunction(DOCUMENTED[name]) or "(" not in text[:80]:
        first = text.split("\n\n")[0].rstrip()
        assert first.endswith((".", ":")), f"{name}: {first!r} is no sentence"
    for line in text.splitlines():
        title = re.fullmatch(r"(\w+):", line)
        assert title is None or title[1] in SECTIONS, f"{name} has a section {line!r}; there are {SECTIONS}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_explained(name: str) -> None:
    """One that is alone may be explained by the sentence itself."""
    function = FUNCTIONS[name]
    text, wanted = doc(function), parameters(function)
    arguments = section(text, "Args")
    if arguments is None:
        assert len(wanted) <= 1, f"{name} takes {', '.join(wanted)}, and has no Args section"
    else:
        assert entries(arguments) == set(wanted), f"{name} explains other parameters than it has"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_returned_is_explained(name: str) -> None:
    """By a first sentence that is about it ("The forwards of ..."), or else in a Returns section."""
    function = FUNCTIONS[name]
    text, returns = doc(function), inspect.signature(function).return_annotation
    gives = returns not in (None, "None") and not is_context_manager(function)
    has_section = section(text, "Returns") is not None
    if section(text, "Args") is not None and gives:
        assert has_section or re.match(r"(An?|The|This|What|Whether|How) ", text), f"{name} returns {returns}"
    assert gives or not has_section, f"{name} returns nothing, and says what"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_raised_is_named(name: str) -> None:
    missing = {error for error in raised(FUNCTIONS[name]) if error not in doc(FUNCTIONS[name])}
    assert not missing, f"{name} raises {', '.join(missing)}, and doesn't say so"


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_members_are_explained(name: str) -> None:
    """In an Attributes section, or by a string or comment beside the field."""
    cls = CLASSES[name]
    if issubclass(cls, enum.Enum):
        names = {member.name for member in cls}
    elif dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
    else:
        return
    explained = entries(section(doc(cls), "Attributes") or "")
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
            explained |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert names <= explained, f"{name} doesn't explain {', '.join(sorted(names - explained))}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_every_public_name_is_there_once_and_in_order() -> None:
    names = diffusers_omni_offload.__all__
    assert len(names) == len(set(names)) and list(names) == sorted(names)
    assert not [name for name in names if name.startswith("_")]
