"""python -m tests.driver: builds the stand-in driver, and PyCUDA for it, where they are not there; says why not
where it cannot.
"""

import sys

from tests.driver import pycuda
from tests.driver.build import NotHereError, library_folder
from tests.driver.items import is_on_machine

if is_on_machine():
    sys.exit(print("the driver of a GPU is here, and the tests take that"))
try:
    print(f"stand-in driver: {library_folder()}\nPyCUDA over it: {pycuda.build()}")
except NotHereError as error:
    sys.exit(f"tests of the CUDA runtimes skip here: {error}")
