# SPDX-License-Identifier: Apache-2.0
"""Messages of any type, made from its descriptor: right ones, odd ones, and bytes that are none."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

KEY = bytes(range(16))
UNSIGNED = [0, 1, 2, 3, 16, 64, 100, 255, 4096, (1 << 16) - 1, 1 << 20, (1 << 31) - 1]
WIDE = [1 << 32, (1 << 48) - 1, 1 << 63, (1 << 64) - 1]
TEXTS = [
    "",
    "s",
    "r",
    "nobody",
    "model",
    "test",
    "protocol",
    "127.0.0.1",
    "layers.0",
    "\0",
    "ß\u2028",
    "x" * 600,
]
BYTES = [b"", KEY, b"k" * 16, b"\xff" * 16, b"short", b"long" * 500]
MOST = 4  # items of a repeated field, and levels of messages within messages

_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([*UNSIGNED, (1 << 32) - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from(UNSIGNED + WIDE),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([*UNSIGNED, -1, -(1 << 31)]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 25),
}


def saying(of: type[Message]) -> st.SearchStrategy[bytes]:
    """The bytes of a message of this type; now and then cut, flipped, or no message at all."""
    whole = messages(of.DESCRIPTOR).map(lambda message: message.SerializeToString())
    return st.one_of(
        whole,
        whole,
        whole,
        st.builds(_cut, whole, st.integers(0, 99)),
        _flipped(whole),
        st.binary(max_size=64),
    )


def _cut(data: bytes, percent: int) -> bytes:
    return data[: len(data) * percent // 100]


def _flipped(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    def flip(data: bytes, at: int, bit: int) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        changed[at % len(data)] ^= 1 << bit
        return bytes(changed)

    return st.builds(flip, whole, st.integers(0, 10_000), st.integers(0, 7))


def messages(of: Descriptor, level: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type, any of whose fields may be absent."""
    return _messages(of.full_name, of, level)


@cache
def _messages(name: str, of: Descriptor, level: int) -> st.SearchStrategy[Message]:
    fields = {field.name: field for field in of.fields}
    values = {
        name: _values(field, level + 1)
        for name, field in fields.items()
        if level < MOST or field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE
    }
    choices = [[f.name for f in oneof.fields if f.name in values] for oneof in of.oneofs]
    chosen = {name for choice in choices for name in choice}
    plain = {name: value for name, value in values.items() if name not in chosen}
    made = [st.fixed_dictionaries({}, optional=plain)]
    made += [_one(choice, values) for choice in choices if choice]
    return st.tuples(*made).map(lambda parts: _build(of, {k: v for part in parts for k, v in part.items()}))


def _one(choice: list[str], values: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from(choice).flatmap(lambda name: values[name].map(lambda value: {name: value}))


def _build(of: Descriptor, values: dict[str, Any]) -> Message:
    return GetMessageClass(of)(**values)


def _values(field: FieldDescriptor, level: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return st.dictionaries(st.sampled_from(TEXTS), st.sampled_from(TEXTS), max_size=MOST)
    one = _single(field, level)
    repeated = field.default_value == []  # its label has other names in other versions of protobuf
    return st.lists(one, max_size=MOST) if repeated else one


def _single(field: FieldDescriptor, level: int) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return st.deferred(lambda: messages(field.message_type, level))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(BYTES)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(TEXTS)
    return _RANGES[field.cpp_type]
