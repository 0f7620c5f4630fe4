"""The way in and out: handles, flag, saving, fallbacks, reports, memory. A package, so that file names may recur."""
