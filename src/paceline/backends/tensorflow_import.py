"""Imports TensorFlow, for a process that will be a worker. It is named where others name TensorFlow itself.

A strategy with several workers and `fit` works with Keras 2 only, which is `tf_keras`; by a variable that it looks at
when it is imported, TensorFlow takes that for its `tf.keras`. So this happens at import: later is too late, and who has
set the variable has chosen.
"""

import contextlib
import importlib
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # TensorFlow itself does so too late
with contextlib.suppress(ImportError):  # whoever needs it gets the error, in a call, with a traceback
    importlib.import_module("tensorflow")
    importlib.import_module("tf_keras")
