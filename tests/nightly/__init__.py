"""Long trials, mostly random: steps, jobs, folders and models that no test names. Each is a command; none is a test."""
