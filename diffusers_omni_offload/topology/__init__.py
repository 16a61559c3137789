"""What a pipeline consists of and what of it can be offloaded. Pure: reads modules, moves nothing, hooks nothing."""
