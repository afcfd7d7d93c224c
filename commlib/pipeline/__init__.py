"""Pipelines whose stages train by parameter servers: HetPipe's virtual workers."""
