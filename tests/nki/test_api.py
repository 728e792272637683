"""Every function of the public API 0.6 is there, with its parameters in their order (api_0_6.json)."""

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import pytest

import torchneuron.nki as nki

API = json.loads(Path(__file__).with_name("api_0_6.json").read_text())
MODULES = {"nki": nki, "nl": nki.language, "nisa": nki.isa, "ncc": nki.collectives}
TYPES = (
    "int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 tfloat32 float32 float8_e4m3 float8_e4m3fn "
    "float8_e5m2 float8_e8m0fnu float8_e4m3fn_x4 float8_e5m2_x4 float4_e2m1fn_x4"
).split()


@pytest.mark.parametrize("name", API)
def test_function(name):
    module, _, attribute = name.partition(".")
    function = getattr(MODULES[module], attribute)
    if name == "nl.ds" or inspect.isclass(function):
        parameters = list(inspect.signature(function).parameters)
    else:
        parameters = list(inspect.signature(getattr(function, "body", function)).parameters)
    wanted = [p.lstrip("*") for p in API[name]]
    assert parameters[: len(wanted)] == wanted


def test_types_memories_and_enumerations():
    nl, nisa = nki.language, nki.isa
    for t in TYPES:
        assert getattr(nl, t) == t
    assert nl.hbm is nl.private_hbm and len({id(b) for b in (nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm)}) == 4
    engines = "unknown tensor scalar gpsimd dma vector sync".split()
    assert [getattr(nisa.engine, e).value for e in engines] == list(range(7)) and nl.bool is nl.bool_
    assert nisa.vector_engine is nisa.engine.vector and nisa.constants.engine is nisa.engine
    assert [c.value for c in nisa.reduce_cmd] == [0, 1, 2, 3, 4] and nisa.nc_version.gen4.value == 4
    assert nki.typing.tensor[128, 512] is not None and issubclass(type(nl.NKIObject()), nl.NKIObject)


@pytest.mark.parametrize("decorate", [dataclasses.dataclass, lambda c: c], ids=["dataclass", "plain class"])
def test_fields_of_kernel_classes(decorate):
    @decorate
    class Section(nki.language.NKIObject):
        rows: int
        tag: str
        parts: list = dataclasses.field(default_factory=list)
        offset = None
        scale = 2.0

        def end(self):
            return self.offset + self.rows

    @decorate
    class Tail(Section):
        last: bool = True

    s = Section(rows=3, offset=4)  # a field may be left out
    assert (s.end(), s.scale, Section(1).offset, s.parts) == (7, 2.0, None, []) and not hasattr(s, "tag")
    assert Section(1).parts is not Section(1).parts
    assert (Tail(1, "x").last, Tail(1, last=False).last) == (True, False)
    with pytest.raises(TypeError, match="colour"):
        Section(rows=1, colour=2)

    class Own(Section):
        def __init__(self):
            self.rows = 5

    assert Own().rows == 5


def _mentioned(path):
    """Names of the API that a test module uses: nl.add as an attribute, or "add" as a string in a table of names."""
    aliases = {"nki": "nki", "nl": "nl", "nisa": "nisa", "ncc": "ncc"}
    attributes, strings = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            attributes.add(f"{aliases[node.value.id]}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.update(node.value.split())
    return attributes, strings


def test_every_function_has_a_test():
    shared = {"test_api.py", "conftest.py", "nki_reference.py"}
    found = [_mentioned(p) for p in Path(__file__).parent.glob("*.py") if p.name not in shared]
    attributes = set().union(*(a for a, _ in found))
    strings = set().union(*(s for _, s in found))
    missing = [n for n in API if n not in attributes and n.partition(".")[2] not in strings]
    assert not missing
