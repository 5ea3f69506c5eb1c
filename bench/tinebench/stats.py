"""Order statistics of samples."""


def percentile(samples, p):
    """The nearest-rank p-th percentile: always a value that was measured."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * p // 100)  # ceiling
    return ordered[max(0, int(rank) - 1)]


def summary(samples):
    """n, min, p50 and p99, in the unit of the samples."""
    return {
        "n": len(samples),
        "min": round(min(samples), 3),
        "p50": round(percentile(samples, 50), 3),
        "p99": round(percentile(samples, 99), 3),
    }
