"""Conformance kit: what a codec, an endpoint or a filter must do, as checks for your own tests."""

from commlib.planning.simulate import exchange_once
from commlib.testing.codecs import (
    check_compressor,
    check_config,
    check_contraction,
    check_decode,
    check_determinism,
    check_feedback,
    check_finite,
    check_memory,
    check_non_finite,
    check_payload,
    check_reducible,
    check_scales,
    check_spec_string,
    check_unbiased,
)
from commlib.testing.endpoints import check_endpoint
from commlib.testing.filters import check_filter

__all__ = [
    "check_compressor",
    "check_config",
    "check_contraction",
    "check_decode",
    "check_determinism",
    "check_endpoint",
    "check_feedback",
    "check_filter",
    "check_finite",
    "check_memory",
    "check_non_finite",
    "check_payload",
    "check_reducible",
    "check_scales",
    "check_spec_string",
    "check_unbiased",
    "exchange_once",
]
