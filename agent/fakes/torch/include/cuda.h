// c10 asks for this name; of the driver interface the harness needs nothing.
#pragma once
