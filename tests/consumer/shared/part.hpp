// What each of the two shared libraries offers; neither knows of the other.
#pragma once

#define SHARED __attribute__((visibility("default")))

/// ln of the sum of a decode step over a small text, by a cache of the library's own.
SHARED float left_step();
SHARED float right_step();
/// Raises verkv::invalid_argument.
SHARED void left_refusal();
SHARED void right_refusal();
