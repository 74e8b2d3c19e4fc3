/* Loaded before the ranks of a lab: who waits for the network sleeps, an eighth of what it has waited, instead of asking for the
   processor again at once.

   On hosts of their own a waiting thread takes nothing from anybody; where all hosts share a few cores it would take up to half
   of what the others compute with. */
#include <time.h>

enum { LOOK = 30000, LEAST = 30000, MOST = 300000 }; /* ns: of one look at the network without news, and pauses */

static __thread long long began, woke; /* ns: of the wait, and of the last pause in it */

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int sched_yield(void) {
    const long long time = now();
    if (time - woke > LOOK) began = time; /* there were news: this is another wait */
    const long long due = (time - began) / 8;
    const struct timespec pause = {0, due < LEAST ? LEAST : due > MOST ? MOST : due};
    nanosleep(&pause, 0);
    woke = now();
    return 0;
}
