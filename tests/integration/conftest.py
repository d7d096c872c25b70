from __future__ import annotations

import pytest

# Helpers that assert are not named test_*, and their asserts should speak as well.
for part in ["comparing", "running"]:
    pytest.register_assert_rewrite(f"tests.integration.{part}")
