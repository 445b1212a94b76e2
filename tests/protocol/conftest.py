"""Settings that all tests of the protocol share: property tests that are the same every time."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "protocol",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("protocol")
