"""What a pipeline consists of and what of it can be streamed. Pure: reads modules, moves nothing, hooks nothing."""
