"""The way in and out: handles, the flag, saving, fallbacks, reports, memory. A package, so that names may recur elsewhere."""
