// As cuda_runtime_api.h beside it: c10 asks for this name too.
#pragma once

#include <cuda_runtime_api.h>
