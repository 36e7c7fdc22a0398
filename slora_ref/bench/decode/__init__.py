"""`bench decode`: a decode step of a large model, part by part, beside what its bytes and FLOPs must cost."""

from slora_ref.bench.decode.cases import DecodeCase, DecodeOptions

__all__ = ["DecodeCase", "DecodeOptions"]
