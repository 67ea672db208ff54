from tuning.api import Configuration as Configuration
from tuning.api import LoadedBest as LoadedBest
from tuning.api import Result as Result
from tuning.api import load_best as load_best
from tuning.api import load_model as load_model
from tuning.api import read_run as read_run
from tuning.api import tune as tune

__version__: str

def search_path() -> str: ...
