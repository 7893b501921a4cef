"""References: NumPy, float64, loops a reader believes at once. They are the specification of the kernels."""
