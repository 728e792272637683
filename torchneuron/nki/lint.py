"""What of a kernel's Python the vendor's compiler refuses: kernels are plain Python here, and a subset of it there.

    torchneuron nki lint kernel.py

Looked at are the functions and methods that are made kernels (@nki.jit, nki.jit(f), nki.simulate(f), wrap_nki(f)) and
the functions and classes of the same file that they use.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

# Statements and expressions without a meaning in the kernel language, and what to write instead.
_REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "exceptions cannot be caught in a kernel: check before with `if` or `assert`",
    ast.Raise: "`raise` is not part of the kernel language: use `assert`",
    ast.Yield: "generators are not part of the kernel language: use a list",
    ast.YieldFrom: "generators are not part of the kernel language: use a list",
    ast.GeneratorExp: "generators are not part of the kernel language: use a list",
    ast.Set: "sets are not part of the kernel language: use a tuple or a dict",
    ast.SetComp: "sets are not part of the kernel language: use a tuple or a dict",
    ast.Global: "`global` is not part of the kernel language: pass the value",
    ast.Nonlocal: "`nonlocal` is not part of the kernel language: pass the value",
    ast.Import: "imports belong at the head of the file",
    ast.ImportFrom: "imports belong at the head of the file",
    ast.AsyncFunctionDef: "`async` is not part of the kernel language",
    ast.Await: "`async` is not part of the kernel language",
    ast.AsyncFor: "`async` is not part of the kernel language",
    ast.AsyncWith: "`async` is not part of the kernel language",
    ast.Delete: "`del` is not part of the kernel language: buffers end with their last use",
}
_MAKERS = {"jit", "simulate", "profile", "wrap_nki"}  # of kernels
_BASES = {"NKIObject", "Enum", "IntEnum", "NamedTuple"}
_CONTEXTS = {"no_reorder"}
_CONSTANTS = (bool, int, float, str, type(None), type(...))


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place: line and column (from 1), and what to do there."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.line}:{self.column}: {self.message}"


def lint(source: str | Path) -> list[Finding]:
    """Findings in a kernel file (a path) or in Python text, by line. SyntaxError if it is not Python."""
    tree = ast.parse(source.read_text() if isinstance(source, Path) else source)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    every = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    called = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n) in _MAKERS]
    made = {_name(a) for c in called for a in c.args if isinstance(a, (ast.Name, ast.Attribute))}
    open_ = [f for f in every if f.name in made or any(_name(d) in _MAKERS for d in f.decorator_list)]
    linter = _Linter(set(open_))
    seen: set[ast.AST] = set()
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        linter.check(node)
        for used in ast.walk(node):
            if isinstance(used, ast.Name):
                open_.extend(table[used.id] for table in (functions, classes) if used.id in table)
    return sorted(set(linter.findings), key=lambda f: (f.line, f.column))


def _name(node: ast.AST) -> str:
    """The last name of `a`, `a.b` or a call of either."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Linter(ast.NodeVisitor):
    def __init__(self, kernels: set[ast.FunctionDef]) -> None:
        self.kernels = kernels
        self.findings: list[Finding] = []

    def check(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.outer = node
        self.visit(node)

    def report(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding(node.lineno, node.col_offset + 1, message))

    def visit(self, node: ast.AST) -> None:
        if type(node) in _REFUSED:
            self.report(node, _REFUSED[type(node)])
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        kernel = node in self.kernels
        if node.args.kwonlyargs:
            self.report(node, "keyword-only parameters (`*` in the signature) are refused: make them ordinary ones")
        if node.decorator_list and not kernel and not isinstance(self.outer, ast.ClassDef):
            self.report(node.decorator_list[0], "sub-kernels take no decorators but @nki.jit")
        if kernel:
            arguments = node.args.posonlyargs + node.args.args
            defaults = dict(zip(reversed(arguments), reversed(node.args.defaults)))
            for a in arguments:
                annotation = a.annotation.value if isinstance(a.annotation, ast.Subscript) else a.annotation
                if isinstance(defaults.get(a), ast.List) or (annotation and _name(annotation) in ("list", "List")):
                    self.report(a, f"the kernel's argument {a.arg} is a list: take a tuple")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        known = any(_name(b) in _BASES for b in node.bases)
        if not known and not any(_name(d) == "dataclass" for d in node.decorator_list):
            self.report(node, f"class {node.name} derives from neither nl.NKIObject nor Enum and is no dataclass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(o, (ast.Is, ast.IsNot)) for o in node.ops):
            self.report(node, "`is` and `is not` are refused: write == and !=")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if any(_name(i.context_expr) not in _CONTEXTS for i in node.items):
            self.report(node, "`with` takes nl.no_reorder() alone")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "divide" and _name(node.value) in ("nl", "language"):
            self.report(
                node, "no engine has nl.divide: multiply by nl.reciprocal, or use nl.divide in simulation alone"
            )
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, _CONSTANTS):
            self.report(node, f"{type(node.value).__name__} values are not part of the kernel language")

    def visit_Dict(self, node: ast.Dict) -> None:
        if any(isinstance(k, ast.Constant) and not isinstance(k.value, str) for k in node.keys):
            self.report(node, "the keys of a dict are strings")
        self.generic_visit(node)
