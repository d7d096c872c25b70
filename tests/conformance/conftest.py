from __future__ import annotations

import pytest

# The conformance classes live in modules that are not named test_*, and their asserts should speak as well.
for part in ["lifetime", "reading", "subject"]:
    pytest.register_assert_rewrite(f"tests.conformance.transport_{part}")
