/* The kernels of one instruction set: compiled once for each, with its flags and SSD_ISA set to its
 * header (isa/). */
#include SSD_ISA

#include "scratch.h"
#include "decoder.h"
#include "product.h"
#include "rows.h"
#include "slots.h"
#include "threads.h"

#include "attend.h"
#include "pass.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const struct kernels JOIN(kernels_, ISA) = {TEXT(ISA), run_pass, multiply, read_row, attend,
                                       keep_halves};
