"""From the name of a model to a local folder that holds it.

A folder is checked, a Hub id is fetched, and no name at all means the embedded model. This package
must not know what is done with the files, and imports neither torch nor transformers.
"""
