/* Preloaded into a rank: each thread of gloo sleeps 100 ms when it has reported the end of a collective, before it
   releases the collective's tensors. A busy machine does the same by giving the processor to others. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

typedef int (*Broadcast)(pthread_cond_t *);

int pthread_cond_broadcast(pthread_cond_t *condition) {
    static Broadcast real;
    if (real == NULL) {
        /* x86-64 also has an older function of this name, which the plain lookup may find */
        real = (Broadcast)dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
        if (real == NULL) real = (Broadcast)dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    }
    int code = real(condition);
    char name[17] = "";
    if (getenv("SLOW_GLOO") != NULL && prctl(PR_GET_NAME, name) == 0 && strncmp(name, "pt_gloo", 7) == 0) {
        usleep(100000);
    }
    return code;
}
