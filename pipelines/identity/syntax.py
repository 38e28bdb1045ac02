"""The digest of a Python source: of what it does, whatever its comments and its layout.

It is a hash over the syntax tree. Comments, positions and docstrings are left out, those below an
attribute as well. Python 3.11, 3.12 and 3.13 give one text the same digest: what only one of them
has in its tree (an empty list of type parameters, an f-string's text in several pieces) is left out
or put together.
"""

import ast
import hashlib
from collections.abc import Iterator

_NOT_MEANT = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields that follow from where a node stands, or that nothing reads when the code runs."""
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_ATTRIBUTES = (ast.Module, ast.ClassDef)


def digest(tree: ast.Module) -> str:
    """32 characters that change when the code does."""
    return hashlib.md5("\n".join(_words(tree)).encode(), usedforsecurity=False).hexdigest()


def _words(value: object) -> Iterator[str]:
    """A node as its type and its fields by name; the empty ones are left out."""
    if isinstance(value, ast.Constant):
        # Not `repr`: which characters it writes out depends on the version of Unicode.
        yield f"{type(value.value).__name__} {value.value!a}"
    elif isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for name in sorted(set(value._fields) - _NOT_MEANT):
            field = _field(value, name)
            if field is not None and field != []:
                yield name
                yield from _words(field)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _words(item)
        yield "]"
    else:
        yield ascii(value)


def _field(node: ast.AST, name: str) -> object:
    value = getattr(node, name, None)
    if name == "body" and isinstance(value, list):
        return _without_docstrings(node, value)
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _joined(node.values)
    return value


def _without_docstrings(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    """A block without the strings that document it, or the attribute above them."""
    kept = body[1:] if isinstance(node, _WITH_DOCSTRING) and _is_string(body[:1]) else body
    if not isinstance(node, _WITH_ATTRIBUTES):
        return kept
    return [
        statement
        for before, statement in zip([None, *kept], kept, strict=False)
        if not (isinstance(before, ast.Assign | ast.AnnAssign) and _is_string([statement]))
    ]


def _is_string(statements: list[ast.stmt]) -> bool:
    return any(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for statement in statements
    )


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, text beside text put together."""
    parts: list[ast.expr] = []
    for value in values:
        text = value.value if isinstance(value, ast.Constant) else None
        if text is None or not isinstance(text, str):
            parts.append(value)
        elif parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(str(parts[-1].value) + text)
        elif text:
            parts.append(value)
    return parts
