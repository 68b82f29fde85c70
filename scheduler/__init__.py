"""Choose: cost model, schedule, simulator and planners, over records alone."""
